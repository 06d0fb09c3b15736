"""Problems in files of any layout: read once, written as a table of rows that every process of the run opens.

::

    task.dataset ─▶ open_dataset() ─┬─ table exists ─────────────────────────────────▶ DatasetSource
                                    └─ _write():                                           ▲
         hub.download() ─▶ files ─▶ read_rows() ─▶ recognize() ─▶ Mapper.map() ─────▶ TableWriter
                                     (pyarrow)     layouts        expressions, filter      one file, renamed when complete

Only reading Parquet, Arrow and ``.zst`` files needs pyarrow, and only ``hub`` needs huggingface_hub. A table needs neither, so the
coordinator and the generators do not either.
"""

from scalerl_tasks.dataset.table_source import DatasetSource, open_dataset

__all__ = ["DatasetSource", "open_dataset"]
