# The public names, read when the package is imported: from HOME import NAME as NAME
from collections.abc import Callable
from typing import Any

from ramify import evaluate as evaluate
from ramify import inference as inference
from ramify import plans as plans
from ramify import ray as ray
from ramify import tasks as tasks
from ramify import testing as testing
from ramify import train as train
from ramify.clients.base import Client as Client
from ramify.clients.base import Price as Price
from ramify.clients.base import Sampling as Sampling
from ramify.clients.model_config import Model as Model
from ramify.engine.branch_search import BestOfBranches as BestOfBranches
from ramify.engine.branch_search import by_score as by_score
from ramify.engine.branch_search import vote as vote
from ramify.engine.limits import Limits as Limits
from ramify.engine.mcp_tools import McpTools as McpTools
from ramify.engine.prompt_preview import FirstRequestPreview as FirstRequestPreview
from ramify.engine.prompt_scaffold import Scaffold as Scaffold
from ramify.engine.question import RunOptions as RunOptions
from ramify.engine.resources import DepthOptions as DepthOptions
from ramify.engine.rlm import RLM as RLM
from ramify.engine.run_result import Result as Result
from ramify.engine.typed_answers import Citation as Citation
from ramify.errors import ConfigError as ConfigError
from ramify.errors import ModelError as ModelError
from ramify.errors import RamifyError as RamifyError
from ramify.errors import ReplayDiverged as ReplayDiverged
from ramify.errors import RunSuspendedError as RunSuspendedError
from ramify.errors import SandboxError as SandboxError
from ramify.errors import SourceError as SourceError
from ramify.errors import StoreError as StoreError
from ramify.errors import TrainError as TrainError
from ramify.errors import WeakSandboxWarning as WeakSandboxWarning
from ramify.maps.api import amap as amap
from ramify.maps.api import map as map
from ramify.maps.map_run import MapResult as MapResult
from ramify.progress import ProgressState as ProgressState
from ramify.progress import subscribe as subscribe
from ramify.sandbox.base import CellResult as CellResult
from ramify.sandbox.base import JailSpec as JailSpec
from ramify.sandbox.base import PreparedContext as PreparedContext
from ramify.sandbox.base import Sandbox as Sandbox
from ramify.sandbox.base import SandboxCapabilities as SandboxCapabilities
from ramify.sandbox.base import SandboxSpec as SandboxSpec
from ramify.sandbox.base import Session as Session
from ramify.sandbox.base import open_sandbox as open_sandbox
from ramify.sandbox.providers.docker import DockerSpec as DockerSpec
from ramify.sources.load_sources import load as load
from ramify.store.base import RunStore as RunStore
from ramify.store.folder_store import Store as Store
from ramify.store.memory_store import MemoryStore as MemoryStore
from ramify.testing.scripted_client import ScriptedClient as ScriptedClient
from ramify.types.event import CallEnded as CallEnded
from ramify.types.event import CallStarted as CallStarted
from ramify.types.event import CellRan as CellRan
from ramify.types.event import Event as Event
from ramify.types.event import ModeChosen as ModeChosen
from ramify.types.event import NoteAdded as NoteAdded
from ramify.types.event import ReplyReceived as ReplyReceived
from ramify.types.event import RequestAttemptFailed as RequestAttemptFailed
from ramify.types.event import RequestStarted as RequestStarted
from ramify.types.event import RunEnded as RunEnded
from ramify.types.event import RunResumed as RunResumed
from ramify.types.event import RunStarted as RunStarted
from ramify.types.event import ScoreAdded as ScoreAdded
from ramify.types.event import ToolAnswered as ToolAnswered
from ramify.types.message import Message as Message
from ramify.types.message import Usage as Usage
from ramify.types.picture import Picture as Picture
from ramify.types.picture import PictureBytes as PictureBytes
from ramify.types.trajectory import Call as Call
from ramify.types.trajectory import Cell as Cell
from ramify.types.trajectory import Stop as Stop
from ramify.types.trajectory import Trajectory as Trajectory
from ramify.types.trajectory import Turn as Turn
from ramify.viewer.open_viewer import ServedViewerPage as ServedViewerPage
from ramify.viewer.open_viewer import view as view

__version__: str

def lazy_namespace(
    package: str, folder: str
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]: ...
