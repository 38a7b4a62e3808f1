"""A run on a Slurm cluster: the script of its job, the submitit plugin that sends it, and what runs on its nodes."""
