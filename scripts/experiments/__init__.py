"""What every experiment is made of: child processes, results that survive, models, tables and pictures."""
