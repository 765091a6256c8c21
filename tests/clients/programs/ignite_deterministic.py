"""ignite's DeterministicEngine, which rebuilds the loader's batch sampler so that a run can be resumed."""

import torch
from ignite.engine.deterministic import DeterministicEngine
from seen import Log, Numbers, loader_class


def main() -> None:
    log = Log()
    engine = DeterministicEngine(lambda engine, batch: log.batch(engine.state.epoch - 1, batch))
    torch.manual_seed(3)
    engine.run(loader_class()(Numbers(), batch_size=25, shuffle=True, num_workers=1), max_epochs=2)
    log.write(0)


if __name__ == "__main__":
    main()
