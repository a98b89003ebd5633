"""Parts of all experiments: child processes, results that survive, models, tables and pictures."""
