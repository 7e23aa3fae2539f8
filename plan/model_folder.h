#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include <tessera/plan/planned_model.h>

namespace tessera {

/// What a model's config leaves open.
struct ModelOptions {
  /// Positions of a row of tokens; 0: the most that the model has, but not more than 2,048.
  int64_t sequence = 0;
  /// false: without the dropout that the config says.
  bool dropout = true;
  /// false: RMS norms by plain operators in fp32, one after another, as models have them that were written before LibTorch's.
  bool fused_norms = true;
  /// false: attention by two products with a mask, a softmax and a dropout of all scores between them, each an operator of its
  /// own, as models have it that were written before fused kernels. Sequences are not split over ranks then.
  bool fused_attention = true;
  /// false: the names and shapes in the folder's safetensors are not compared with the model's.
  bool checks_weights = true;
};

/// A model to plan for, from one of
///   a folder as Hugging Face's: config.json, whose "architectures" names one of `model_architectures`, and maybe weights, whose
///   names and shapes must be the model's;
///   the config.json alone;
///   a file of layers, {"format": "tessera layers", …}, which docs/planning.md specifies.
/// The module computes what the architecture says: the parameters have the names of Hugging Face's (the experts of a layer are
/// stacked), and a linear layer has its weight as [out, in], that of GPT-2 too. The loss is the cross entropy of the labels; of a
/// model without a head the mean square of what it returns. Batches are made up.
///
/// Errors name the file and the key or tensor: no config.json; an unknown architecture (with the nearest known one) or way to
/// compute; a key that is missing, of another type or range; sizes that do not fit each other; tensors that are missing, too
/// many, or of another shape. Only headers of weights are read. Local.
PlannedModel read_model(const std::filesystem::path& path, const ModelOptions& options = {});

/// The names of "architectures" in a config.json that `read_model` knows.
std::vector<std::string> model_architectures();

} // namespace tessera
