"""Inside a rank. PyTorch is imported here and nowhere else."""
