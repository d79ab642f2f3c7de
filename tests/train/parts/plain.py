"""A script that knows nothing of jobs: what Python gives it in, printed; then it ends as its argument says."""

import multiprocessing
import os
import pickle
import sys

import torch


class Thing:
    pass


def child(queue) -> None:  # type: ignore[no-untyped-def]
    queue.put(("child", __name__, sys.argv, os.environ.get("TORCHRELAY_TRAIN_CHANNEL")))


if __name__ == "__main__":
    print(__name__, __file__, __spec__, sys.argv, sys.path[0], sys.modules["__main__"].__dict__ is globals())
    print(type(pickle.loads(pickle.dumps(Thing()))) is Thing, torch.get_float32_matmul_precision())
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=child, args=(queue,))
    process.start()
    print(queue.get(timeout=120), flush=True)  # an abort leaves the rest unwritten
    process.join()
    match sys.argv[1]:
        case "raise":
            raise ValueError("as asked")
        case "exit":
            sys.exit(5)
        case "interrupt":
            raise KeyboardInterrupt("as asked")
        case "die":
            os.abort()
