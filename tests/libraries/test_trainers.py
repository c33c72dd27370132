"""Trainers of others with a Loader in place of a DataLoader: Accelerate, the Trainer of transformers, Ignite."""

import pytest

torch = pytest.importorskip("torch")

from cachedfs.datasets import FileDataset, Loader  # noqa: E402
from cachedfs.datasets.sampler import EpochOrders  # noqa: E402

N = 8


def row(data):
    return torch.tensor(float(data))


@pytest.fixture
def url(place):
    for i in range(N):
        place.put(f"rows/{i}.txt", b"%d" % i)
    return place.url("rows/*.txt")


def batches(epoch, n=4):
    """Return the first batches of an epoch."""
    return EpochOrders(N, 0, "full").order(epoch).reshape(-1, 2)[:n].tolist()


def loader_of(url, **options):
    return Loader(FileDataset(url, decode=row), batch_size=2, shuffle=True, **options)


def test_accelerate(place, url):
    accelerator = pytest.importorskip("accelerate").Accelerator(cpu=True)
    for _ in place.twice(fetches=N):
        with loader_of(url) as loader:
            assert len(list(loader)) == 4  # all files are fetched here
            prepared = accelerator.prepare(loader)
            seen = [batch.tolist() for _ in range(3) for batch, _ in zip(prepared, "ab", strict=False)]
        assert seen == [*batches(1, 2), *batches(2, 2), *batches(3, 2)]


def test_the_trainer_of_transformers(place, url, tmp_path):
    transformers = pytest.importorskip("transformers")
    seen = []

    class Linear(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def forward(self, row):
            seen.append(row.tolist())
            return {"loss": self.layer(row[:, None]).mean()}

    class Fed(transformers.Trainer):
        def get_train_dataloader(self):
            return loader

    def arguments(**options):
        return transformers.TrainingArguments(
            str(tmp_path), use_cpu=True, save_strategy="no", report_to="none", disable_tqdm=True, **options
        )

    for _ in place.twice(fetches=N):
        seen.clear()
        with loader_of(url, collate_fn=lambda rows: {"row": torch.stack(rows)}) as loader:
            Fed(Linear(), arguments(max_steps=7), train_dataset=loader.dataset).train()
            assert loader.epoch == 1
        assert seen == [*batches(0), *batches(1, 3)]


def test_ignite(place, url):
    Engine = pytest.importorskip("ignite.engine").Engine
    for _ in place.twice(fetches=N):
        seen = []

        def step(engine, batch, seen=seen):
            seen.append(batch.tolist())

        with loader_of(url) as loader:
            assert len(list(loader)) == 4  # all files are fetched here
            Engine(step).run(loader, max_epochs=3, epoch_length=2)
        assert seen == [*batches(1), *batches(2, 2)]
