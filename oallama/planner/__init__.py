"""Planning: from costs and device memory to a verified placement of each operator. Pure."""
