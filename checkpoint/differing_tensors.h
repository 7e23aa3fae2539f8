#pragma once

namespace tessera::checkpoint {

/// What a save keeps of a plain tensor whose values differ between ranks: a buffer such as the running statistics of a BatchNorm,
/// or a parameter that nothing shards.
enum class DifferingTensors {
  kWarn,       ///< the lowest rank's, with a warning that names all such tensors, once in a process for the same names
  kLowestRank, ///< the lowest rank's, without a warning
  kMean,       ///< the mean over the ranks that have it; of integers and booleans the lowest rank's
  kEachRank,   ///< each rank's: a load gives rank r its own, and the lowest rank's where rank r had none
  kError,      ///< an error that names them
};

/// The choice, from now on and in this process, of every save whose options leave `differing_tensors` unset; kWarn before the
/// first call. Local; every rank makes the same choice, before its first save.
void set_differing_tensors(DifferingTensors choice);
/// That choice.
DifferingTensors differing_tensors();

} // namespace tessera::checkpoint
