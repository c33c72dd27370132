"""Lightning: checkpoints that it writes and finds again, and a DataModule over files of a cloud."""

import contextlib

import fsspec
import pytest

from tests import import_torchvision

with contextlib.suppress(ImportError):
    import_torchvision.torchvision()  # imported by Lightning where it is installed
torch = pytest.importorskip("torch")
L = pytest.importorskip("pytorch_lightning")

from pytorch_lightning.callbacks import ModelCheckpoint  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

from cachedfs.datasets import FileDataset, Loader  # noqa: E402
from cachedfs.datasets.sampler import EpochOrders  # noqa: E402
from tests.libraries.data import forking  # noqa: E402

pytestmark = [
    forking,
    # A warning of Lightning's own calls of torch.
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated"),
    # Advice of Lightning for larger machines and longer trainings.
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
]


class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.seen = []

    def training_step(self, batch, i):
        self.seen.append(tuple(batch[:, 0].tolist()))
        return self.layer(batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)


def row(data):
    return torch.frombuffer(bytearray(data), dtype=torch.float32)


class Rows(L.LightningDataModule):
    def __init__(self, url):
        super().__init__()
        self.url = url

    def setup(self, stage):
        self.rows = FileDataset(self.url, decode=row)

    def train_dataloader(self):
        return DataLoader(self.rows, batch_size=4, num_workers=2)


def training(**options):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return L.Trainer(accelerator="cpu", enable_checkpointing="callbacks" in options, **quiet, **options)


@pytest.fixture
def url(place):
    for i in range(8):
        place.put(f"rows/{i}.bin", torch.full((4,), float(i)).numpy().tobytes())
    return place.url("rows/*.bin")


def test_a_data_module(place, url):
    for _ in place.twice(fetches=8):
        trainer = training(max_epochs=2)
        trainer.fit(Model(), Rows(url))
        assert trainer.global_step == 4


def test_the_loader_in_place_of_a_data_loader(place, url):
    for _ in place.twice(fetches=8):
        with Loader(FileDataset(url, decode=row), batch_size=4) as loader:
            trainer = training(max_epochs=2)
            trainer.fit(Model(), loader)
        assert trainer.global_step == 4


def test_epochs_of_a_part_of_the_batches(place, url):
    for _ in place.twice(fetches=8):
        model = Model()
        with Loader(FileDataset(url, decode=row), batch_size=2, shuffle=True) as loader:
            assert len(list(loader)) == 4  # all files are fetched here
            trainer = training(max_epochs=3, limit_train_batches=2)
            trainer.fit(model, loader)
            assert (loader.epoch, trainer.global_step) == (3, 6)
        assert model.seen == [
            tuple(two)
            for epoch in (1, 2, 3)
            for two in EpochOrders(8, 0, "full").order(epoch)[:4].reshape(2, 2).tolist()
        ]


# Training continues there.
@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
def test_checkpoints(place, url):
    folder, model = place.url("run"), Model()
    keep = ModelCheckpoint(dirpath=folder, save_last=True, save_top_k=-1)
    training(max_epochs=2, callbacks=[keep]).fit(model, Rows(url))
    assert place.fs.ls(place.path("run"), detail=False) == [
        place.path(f"run/{name}.ckpt") for name in ("epoch=0-step=2", "epoch=1-step=4", "last")
    ]
    for _ in place.twice(fetches=1):
        back = Model.load_from_checkpoint(f"{folder}/last.ckpt")
        assert torch.equal(back.layer.weight, model.layer.weight)
    trainer = training(max_epochs=3, callbacks=[keep])
    trainer.fit(Model(), Rows(url), ckpt_path=f"{folder}/last.ckpt", weights_only=True)
    assert (trainer.current_epoch, trainer.global_step) == (3, 6)
    url = place.url("model.ckpt")
    trainer.save_checkpoint(url)
    with fsspec.open(url) as file:
        weight = torch.load(file)["state_dict"]["layer.weight"]
    assert torch.equal(weight, trainer.model.layer.weight)
