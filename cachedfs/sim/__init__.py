"""Simulated Google Cloud Storage and Google Drive for tests, demos and benchmarks.

All timings measured against them are simulated.
"""

import importlib.util

if importlib.util.find_spec("google_crc32c") is None:
    raise ImportError('The simulated clouds need google-crc32c: pip install "cachedfs[sim]"')

from cachedfs.sim.drive import DriveServer
from cachedfs.sim.faults import Fault
from cachedfs.sim.gcs import GCSServer
from cachedfs.sim.messages import Request
from cachedfs.sim.network import PROFILES, Delay, Profile
from cachedfs.sim.quota import QUOTAS, Quota
from cachedfs.sim.server import SimServer

__all__ = ["PROFILES", "QUOTAS", "Delay", "DriveServer", "Fault", "GCSServer", "Profile", "Quota", "Request"]
__all__ += ["SimServer"]
