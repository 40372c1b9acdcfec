"""Names for types in annotations."""

from typing import Any

# A tensor of the backend, a symbolic one, or None where it is optional: Keras
# has no type that covers them.
Tensor = Any
Tensors = dict[str, Tensor]  # by name
Shape = tuple[int | None, ...]
