"""Cost models: profile records in, seconds out. Pure; each formula stands in one place."""
