"""`oallama bench --matrix`: an entry point of the group oallama.bench."""
