"""A served model without a server: for other servers, and for comparisons."""

from __future__ import annotations

import os

from syncline.serve.model import LoadedModel, ModelFile
from syncline.serve.reading import open_source


def load_model(model: str, weights: str | os.PathLike[str] | None = None, *, pick: str = "best") -> LoadedModel:
    """The model that `syncline serve MODEL --from WEIGHTS` answers with: a function from arrays by name to arrays by
    name, whose first dimension is the batch. `weights`: None for the model as it is made. One thread at a time.
    """
    file = ModelFile(model)
    if weights is None:
        return file.load(None, file.where)
    found = next(iter(open_source(os.fspath(weights), pick).look()))
    return file.load(found.read(), found.where)
