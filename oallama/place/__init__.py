"""Placement policies: costs and a byte budget in, a place for every operator out. Pure."""
