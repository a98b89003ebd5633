"""ScheInfer's published numbers, and what its own performance models predict."""
