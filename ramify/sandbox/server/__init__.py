"""The fork server, a trusted process that forks sessions and sets up their processes."""
