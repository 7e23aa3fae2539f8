#include "gpt/sampling.h"

#include <ATen/CPUGeneratorImpl.h>
#include <tessera/dtensor/api.h>
#include <tessera/fsdp/fully_shard.h>

#include <algorithm>

namespace gpt {
namespace {

// Keeps a sharded model's parameters gathered from one forward to the next, until it goes.
class Gathered {
 public:
  explicit Gathered(Gpt& model) : model_(model) {
    if (tessera::is_sharded(*model_)) tessera::fsdp(*model_).set_reshard_after_forward(false);
  }
  Gathered(const Gathered&) = delete;
  Gathered& operator=(const Gathered&) = delete;
  ~Gathered() {
    if (!tessera::is_sharded(*model_)) return;
    for (const auto& module : model_->modules()) {
      if (tessera::is_sharded(*module)) tessera::fsdp(*module).reshard();
    }
    tessera::fsdp(*model_).set_reshard_after_forward(true);
  }

 private:
  Gpt& model_;
};

} // namespace

std::string sample(Gpt& model, const std::string& prompt, torch::Device device, const SamplingOptions& options) {
  TORCH_CHECK(!prompt.empty(), "sampling needs a prompt of at least one byte");
  torch::NoGradGuard no_grad;
  const Gathered gathered(model);
  auto generator = at::make_generator<at::CPUGeneratorImpl>(options.seed);
  std::string text = prompt;
  for (int64_t i = 0; i < options.bytes; ++i) {
    const auto context = std::min<size_t>(text.size(), static_cast<size_t>(model->config().sequence));
    auto bytes = torch::from_blob(text.data() + text.size() - context, {1, static_cast<int64_t>(context)}, torch::kUInt8);
    auto logits = model->forward(bytes.to(torch::kLong).to(device));
    if (tessera::is_dtensor(logits)) logits = tessera::DTensor(logits).full_tensor(); // of a tensor-parallel model
    logits = logits.select(1, -1).to(torch::kCPU, torch::kFloat);
    const auto next = torch::multinomial(torch::softmax(logits / options.temperature, -1), 1, false, generator);
    text.push_back(static_cast<char>(next.item<int64_t>()));
  }
  return text;
}

std::string printable(std::string text) {
  std::replace_if(
      text.begin(), text.end(), [](char c) { return c != '\n' && (c < ' ' || c > '~'); }, '?');
  return text;
}

} // namespace gpt
