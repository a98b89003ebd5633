"""Cost models: from profile records to seconds. Pure; each formula exists once."""
