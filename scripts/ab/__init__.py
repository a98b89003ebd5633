"""A matrix of comparisons: models x caps x workloads, each cell one `oallama bench`, one report at the end."""
