"""The dashboard. Jupyter lives here and nowhere else."""
