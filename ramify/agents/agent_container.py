"""Run an agent's command in a Docker container.

    docker run --rm --init --name … --network host --user … --volume FOLDER:FOLDER --workdir …
        --env OPENAI_BASE_URL …  IMAGE  COMMAND …

The folder of the rollout has the same path inside, so the item file and the agent's files are where
the command names them. The network is that of this machine, on whose loopback address the endpoint
listens. The agent's variables are passed by name, so no key is on a command line. The container is
removed when it ends, and when the rollout is stopped. If the trainer is killed, the Docker client
gets SIGTERM from its guard (a small process that watches it) and passes the signal on.

The command itself comes from ``agent_command.py``.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Sequence

from ramify.agents.agent_job import AgentRolloutInput
from ramify.errors import ConfigError
from ramify.sandbox.base import SANDBOXES

_PROGRAM = "docker"


class AgentContainer:
    """The container image in which an agent's command runs, and the ``docker`` commands for it."""

    def __init__(self, image: str) -> None:
        """Check that Docker is installed and that ``image`` does not name one of Ramify's
        sandboxes.

        Raises ConfigError if ``image`` is the name of a sandbox, or if the program ``docker`` is
        missing.
        """
        if image in SANDBOXES.ours:
            raise ConfigError(
                f"ExternalAgentTask: container={image!r} is a sandbox for sessions without "
                "network, but an agent must reach its endpoint: give the name of an image, or "
                "leave container out"
            )
        if shutil.which(_PROGRAM) is None:
            raise ConfigError(
                f"ExternalAgentTask: container={image!r} needs the program {_PROGRAM}, which is "
                "not here: install it, or leave container out"
            )
        self._image = image

    def docker_run_command(
        self, command: Sequence[str], job: AgentRolloutInput, names: Iterable[str]
    ) -> list[str]:
        """Return the words of the ``docker run`` command for an agent's command.

        ``names`` lists the environment variables that are passed on to the container.
        """
        folder = str(job.folder.parent)
        variables = [word for name in names for word in ("--env", name)]
        return [
            *(_PROGRAM, "run", "--rm", "--init", "--name", _name(job), "--network", "host"),
            *("--user", f"{os.getuid()}:{os.getgid()}", "--volume", f"{folder}:{folder}"),
            *("--workdir", str(job.folder), "--env", "HOME=/tmp", *variables),
            *(self._image, *command),
        ]

    def docker_remove_command(self, job: AgentRolloutInput) -> list[str]:
        """Return the ``docker rm`` command that removes the container of a rollout."""
        return [_PROGRAM, "rm", "--force", _name(job)]


def _name(job: AgentRolloutInput) -> str:
    """Return the name of a rollout's container: the unique name of the rollout's folder."""
    return job.folder.parent.name
