"""The operations of an exported model: names and output sizes."""

import keras

import keras_armin
from tests.helpers.common import BACKEND
from tests.helpers.common import FEATURES


def operations(model, folder):
    """A list of `(name, shape)` over the graph with all that it calls.

    A SavedModel also holds gradients, which serving does not call.
    """
    return globals()[f"_of_{BACKEND}"](model, folder)


def _of_tensorflow(model, folder):
    import tensorflow as tf

    keras_armin.export(model, folder / "graph")
    graph = tf.saved_model.load(folder / "graph").signatures["serve"].graph
    definition = graph.as_graph_def(add_shapes=True)
    functions = {x.signature.name: x for x in definition.library.function}
    nodes, called = [*definition.node], set()
    for node in nodes:  # which grows on the way
        for attribute in node.attr.values():
            for function in (attribute.func, *attribute.list.func):
                if function.name in functions.keys() - called:
                    called.add(function.name)
                    nodes += functions[function.name].node_def
    return [
        (node.op, tuple(dim.size for dim in shape.dim))
        for node in nodes
        for shape in node.attr["_output_shapes"].list.shape
    ]


def _of_jax(model, folder):
    """Of the very function that Keras hands to the export."""
    import jax

    x = keras.ops.zeros((3, 4, FEATURES))
    found = []

    def visit(jaxpr):
        for equation in jaxpr.eqns:
            for y in equation.outvars:
                found.append((equation.primitive.name, tuple(y.aval.shape)))
            for inner in jax.core.jaxprs_in_params(equation.params):
                visit(inner)

    visit(jax.make_jaxpr(lambda x: model(x))(x).jaxpr)
    return found


def _of_torch(model, folder):
    import torch

    file = folder / "graph.pt2"
    keras_armin.export(model, file, "torch")
    found = []
    for module in torch.export.load(file).graph_module.modules():
        for node in getattr(module, "graph", torch.fx.Graph()).nodes:
            for y in keras.tree.flatten(node.meta.get("val")):
                if node.op == "call_function" and hasattr(y, "shape"):
                    found.append((str(node.target), tuple(y.shape)))
    return found
