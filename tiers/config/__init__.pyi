from .config import Config, ConfigSource, child_environment, nearest, options
from .environment import COMPILED, cache_directory, compiled_setting
from .quantities import format_size, parse_duration, parse_room, parse_size, parse_time, show_size
from .router import MAX_BLOCKS, RouterConfig
from .sections import (
    CacheConfig,
    ChatConfig,
    EventsConfig,
    FileConfig,
    HostConfig,
    ObjectsConfig,
    PeersConfig,
    RedisConfig,
    ServerConfig,
    ServiceConfig,
)
from .values import ByteSize, Lifetime, is_endpoint, is_one_line

__all__ = [
    "COMPILED",
    "MAX_BLOCKS",
    "ByteSize",
    "CacheConfig",
    "ChatConfig",
    "Config",
    "ConfigSource",
    "EventsConfig",
    "FileConfig",
    "HostConfig",
    "Lifetime",
    "ObjectsConfig",
    "PeersConfig",
    "RedisConfig",
    "RouterConfig",
    "ServerConfig",
    "ServiceConfig",
    "cache_directory",
    "child_environment",
    "compiled_setting",
    "format_size",
    "is_endpoint",
    "is_one_line",
    "nearest",
    "options",
    "parse_duration",
    "parse_room",
    "parse_size",
    "parse_time",
    "show_size",
]
