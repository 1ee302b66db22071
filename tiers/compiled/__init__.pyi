from .extensions import extension as extension
from .extensions import status as status
