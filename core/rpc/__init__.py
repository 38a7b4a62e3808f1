"""HTTP between the processes of one run: `service` (server side), `client`, `auth`, `errors`. Torch-free."""
