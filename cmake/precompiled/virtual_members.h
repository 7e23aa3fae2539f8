#pragma once

// For precompiled headers with all of LibTorch: the same of its modules, datasets and optimizers.

#include "virtual_members_of_core.h"

#include <torch/torch.h>

#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR == 11

namespace tessera::precompiled {

/// With what the private `clone_` calls.
template <typename Module>
void instantiate_clone() {
  using Base [[maybe_unused]] = torch::nn::Cloneable<Module>;
  some<Module>() = *std::dynamic_pointer_cast<Module>(some<const Module>().Base::clone());
}

template <typename... Modules>
void instantiate_clones() {
  (instantiate_clone<Modules>(), ...);
}

template <size_t dims, typename Module>
void instantiate_convolution() {
  using Base [[maybe_unused]] = torch::nn::ConvNdImpl<dims, Module>;
  some<Module>().Base::reset();
  some<Module>().Base::pretty_print(some<std::ostream>());
}

template <size_t dims, typename Module>
void instantiate_transposed() {
  using Base [[maybe_unused]] = torch::nn::ConvTransposeNdImpl<dims, Module>;
  instantiate_convolution<dims, Module>();
  some<Module>().Base::pretty_print(some<std::ostream>());
}

template <typename Self, typename Example>
void instantiate_dataset(torch::data::datasets::Dataset<Self, Example>& data) {
  using Base [[maybe_unused]] = torch::data::datasets::Dataset<Self, Example>;
  data.Base::get_batch({});
}

/// What their private `clone` calls.
template <typename Base, typename... Classes>
void instantiate_copies() {
  (void(std::unique_ptr<Base>(std::make_unique<Classes>(some<const Classes>()))), ...);
}

inline void instantiate_modules() {
  using namespace torch::nn; // NOLINT(google-build-using-namespace)
  instantiate_clones<AdaptiveLogSoftmaxWithLossImpl, BilinearImpl, Conv1dImpl, Conv2dImpl, Conv3dImpl, ConvTranspose1dImpl,
                     ConvTranspose2dImpl, ConvTranspose3dImpl, CrossMapLRN2dImpl, EmbeddingBagImpl, EmbeddingImpl, FoldImpl,
                     FractionalMaxPool2dImpl, FractionalMaxPool3dImpl, GRUCellImpl, GRUImpl, GroupNormImpl, LSTMCellImpl,
                     LSTMImpl, LayerNormImpl, LinearImpl, LocalResponseNormImpl, LogSoftmaxImpl, ModuleDictImpl,
                     MultiheadAttentionImpl, ParameterDictImpl, RNNCellImpl, RNNImpl, SequentialImpl, SoftmaxImpl, SoftminImpl,
                     ThresholdImpl, TransformerDecoderImpl, TransformerDecoderLayerImpl, TransformerEncoderImpl,
                     TransformerEncoderLayerImpl, UnflattenImpl, UnfoldImpl>();
  instantiate_convolution<1, Conv1dImpl>();
  instantiate_convolution<2, Conv2dImpl>();
  instantiate_convolution<3, Conv3dImpl>();
  instantiate_transposed<1, ConvTranspose1dImpl>();
  instantiate_transposed<2, ConvTranspose2dImpl>();
  instantiate_transposed<3, ConvTranspose3dImpl>();
}

inline void instantiate_data_and_optimizers() {
  using namespace torch::optim; // NOLINT(google-build-using-namespace)
  instantiate_dataset(some<torch::data::datasets::MNIST>());
  instantiate_dataset(some<torch::data::datasets::TensorDataset>());
  instantiate_copies<OptimizerOptions, AdagradOptions, AdamOptions, AdamWOptions, LBFGSOptions, RMSpropOptions, SGDOptions>();
  instantiate_copies<OptimizerParamState, AdagradParamState, AdamParamState, AdamWParamState, LBFGSParamState, RMSpropParamState,
                     SGDParamState>();
}

} // namespace tessera::precompiled

#endif
