from .config import Config, cache_directory, child_environment, nearest, options
from .quantities import format_size, parse_duration, parse_size, parse_time, show_size
from .router import MAX_BLOCKS, RouterConfig
from .sections import CacheConfig, EventsConfig, FileConfig, HostConfig, RedisConfig, ServerConfig, ServiceConfig
from .values import ByteSize, Lifetime

__all__ = [
    "MAX_BLOCKS",
    "ByteSize",
    "CacheConfig",
    "Config",
    "EventsConfig",
    "FileConfig",
    "HostConfig",
    "Lifetime",
    "RedisConfig",
    "RouterConfig",
    "ServerConfig",
    "ServiceConfig",
    "cache_directory",
    "child_environment",
    "format_size",
    "nearest",
    "options",
    "parse_duration",
    "parse_size",
    "parse_time",
    "show_size",
]
