"""Simulated clouds for tests, demos and benchmarks; figures got from them are simulated."""

from cachedfs.sim.drive import DriveServer
from cachedfs.sim.gcs import GCSServer
from cachedfs.sim.network import PROFILES, Delay, Profile
from cachedfs.sim.quota import QUOTAS, Quota
from cachedfs.sim.server import Fault, Request, SimServer

__all__ = ["PROFILES", "QUOTAS", "Delay", "DriveServer", "Fault", "GCSServer", "Profile", "Quota", "Request"]
__all__ += ["SimServer"]
