"""The jail's confinement: code that runs in its fork server and in a session before user code."""
