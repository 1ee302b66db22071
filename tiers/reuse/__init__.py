"""How requests return: the report of a request's end, and the order of eviction that is learned from it."""

from kvtier.tiers.reuse.ends import ClassifiedEnd, Hint, RequestEnd, hint_of
from kvtier.tiers.reuse.predictor import EDGES, MOST_AHEAD, NO_CLASS, ReusePredictor, make_shadow
