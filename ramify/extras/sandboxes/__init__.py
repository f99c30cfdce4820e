"""Third-party sandboxes: Monty, IPython, and the cloud services E2B, Modal, Daytona and Prime.

Each provider is one file with a function ``open_provider(spec)``, and is chosen by its name in
``SandboxSpec.provider``. Code that several services share is in ``cloud_sandbox_sdk.py``.
"""
