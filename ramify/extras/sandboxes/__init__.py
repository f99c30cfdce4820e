"""Sandboxes of other vendors: Monty, IPython, and the services E2B, Modal, Daytona and Prime.

Each provider is one file with ``open_provider(spec)``, chosen by its name in
``SandboxSpec.provider``. ``sdk.py`` has what the services share.
"""
