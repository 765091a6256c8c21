"""ignite, two ranks: its DeterministicEngine rebuilds the loader's batch sampler so that a run can be resumed."""

import ignite.distributed as idist
import torch
from ignite.engine import Events
from ignite.engine.deterministic import DeterministicEngine
from seen import Log, Numbers, loader_class
from torch.utils.data import DistributedSampler


def main() -> None:
    idist.initialize("gloo")
    torch.manual_seed(3 + idist.get_rank())
    log = Log()
    sampler = DistributedSampler(Numbers())
    loader = loader_class()(Numbers(), batch_size=25, sampler=sampler, num_workers=1)
    engine = DeterministicEngine(lambda engine, batch: log.batch(engine.state.epoch - 1, batch))
    engine.add_event_handler(Events.EPOCH_STARTED, lambda: sampler.set_epoch(engine.state.epoch))
    engine.run(loader, max_epochs=2)
    log.write(idist.get_rank(), sampler=type(loader.sampler).__name__)
    idist.finalize()


if __name__ == "__main__":
    main()
