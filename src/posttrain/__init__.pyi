from posttrain.api.measure import evaluate as evaluate
from posttrain.api.measure import generate as generate
from posttrain.api.run import load_run as load_run
from posttrain.api.sweep import sweep as sweep
from posttrain.api.trainer import Trainer as Trainer
from posttrain.api.training import train as train

__version__: str
