#pragma once

namespace tessera::checkpoint {

/// What a save does with a plain tensor whose values differ between ranks: a buffer such as the running statistics of a
/// BatchNorm, or a parameter that is not sharded.
enum class DifferingTensors {
  kWarn,       ///< the lowest rank's, with a warning that names all such tensors, once in a process for the same names
  kLowestRank, ///< the lowest rank's, without a warning
  kMean,       ///< the mean over the ranks that have it; of integers and booleans the lowest rank's
  kEachRank,   ///< each rank's: a load gives rank r its own, and the lowest rank's where rank r had none
  kError,      ///< an error that names them
};

/// Sets what every later save in this process does, if its options leave `differing_tensors` unset. The default is kWarn. Local;
/// every rank makes the same choice, before its first save.
void set_differing_tensors(DifferingTensors choice);
/// That choice.
DifferingTensors differing_tensors();

} // namespace tessera::checkpoint
