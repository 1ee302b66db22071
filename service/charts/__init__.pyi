from .charts import Chart, Line, Table, html_page, save_png

__all__ = ["Chart", "Line", "Table", "html_page", "save_png"]
