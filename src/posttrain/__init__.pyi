from posttrain.api.diagnose import diagnose as diagnose
from posttrain.api.measure import evaluate as evaluate
from posttrain.api.measure import generate as generate
from posttrain.api.parts import advantages as advantages
from posttrain.api.parts import aggregations as aggregations
from posttrain.api.parts import losses as losses
from posttrain.api.parts import statistics as statistics
from posttrain.api.parts.grading import grade as grade
from posttrain.api.parts.statistics import pass_at_k as pass_at_k
from posttrain.api.run import load_run as load_run
from posttrain.api.sweep import sweep as sweep
from posttrain.api.trainer import Trainer as Trainer
from posttrain.api.training import train as train
from posttrain.api.what_if import load_what_if as load_what_if
from posttrain.api.what_if import what_if as what_if

__version__: str
