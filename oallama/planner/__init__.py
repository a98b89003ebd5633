"""Planning: from costs and a memory budget to a verified placement of each operator. Pure."""
