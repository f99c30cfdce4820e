"""Runs in the fork server of a jail and in the first steps of its sessions: the walls."""
