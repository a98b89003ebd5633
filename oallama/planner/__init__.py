"""Placement policies: from costs and a memory budget to a placement of each operator. Pure."""
