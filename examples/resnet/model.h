#pragma once

#include <torch/torch.h>

namespace resnet {

inline torch::nn::Conv2d convolution(int64_t in, int64_t out, int64_t kernel, int64_t stride = 1) {
  return torch::nn::Conv2d(torch::nn::Conv2dOptions(in, out, kernel).stride(stride).padding(kernel / 2).bias(false));
}

/// Two convolutions, added to their input. Where the shape changes, the input goes through one of its own.
struct BlockImpl : torch::nn::Module {
  BlockImpl(int64_t in, int64_t out, int64_t stride) {
    path =
        register_module("path", torch::nn::Sequential(convolution(in, out, 3, stride), torch::nn::BatchNorm2d(out),
                                                      torch::nn::ReLU(), convolution(out, out, 3), torch::nn::BatchNorm2d(out)));
    if (in == out && stride == 1) return;
    shortcut = torch::nn::Sequential(convolution(in, out, 1, stride), torch::nn::BatchNorm2d(out));
    register_module("shortcut", shortcut);
  }
  torch::Tensor forward(const torch::Tensor& x) { return torch::relu(path->forward(x) + (shortcut ? shortcut->forward(x) : x)); }

  torch::nn::Sequential path{nullptr}, shortcut{nullptr};
};
TORCH_MODULE(Block);

/// Images [N, 1, 8, 8] to scores [N, 10]. It knows nothing of sharding.
struct ResNetImpl : torch::nn::Module {
  ResNetImpl(int64_t width, double dropout_rate) {
    stem = register_module("stem", torch::nn::Sequential(convolution(1, width, 3), torch::nn::BatchNorm2d(width)));
    blocks = register_module(
        "blocks", torch::nn::Sequential(Block(width, width, 1), Block(width, 2 * width, 2), Block(2 * width, 4 * width, 2)));
    dropout = register_module("dropout", torch::nn::Dropout(dropout_rate));
    head = register_module("head", torch::nn::Linear(4 * width, 10));
  }
  torch::Tensor forward(const torch::Tensor& images) {
    const auto features = blocks->forward(torch::relu(stem->forward(images)));
    return head(dropout(features.mean({2, 3})));
  }

  torch::nn::Sequential stem{nullptr}, blocks{nullptr};
  torch::nn::Dropout dropout{nullptr};
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(ResNet);

} // namespace resnet
