from .generation import GenerateOptions, generate, save_model
from .rag import RagOptions, rag_demo
from .recall import NAMES, RECALL_VOCABULARY, make_documents, questions, read, right_answers
from .story import DemoOptions, demo, train_tokenizer
from .worker import BLOCK_SIZE, DemoEngine, demo_model

__all__ = [
    "BLOCK_SIZE",
    "NAMES",
    "RECALL_VOCABULARY",
    "DemoEngine",
    "DemoOptions",
    "GenerateOptions",
    "RagOptions",
    "demo",
    "demo_model",
    "generate",
    "make_documents",
    "questions",
    "rag_demo",
    "read",
    "right_answers",
    "save_model",
    "train_tokenizer",
]
