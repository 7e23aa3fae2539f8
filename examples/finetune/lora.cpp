#include "finetune/lora.h"

#include <tessera/checkpoint/hugging_face.h>
#include <tessera/dtensor/api.h>
#include <tessera/fsdp/meta_init.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "common/files.h"
#include "common/ranks.h"

namespace lora {
namespace nn = torch::nn;

namespace {

torch::Tensor whole(const torch::Tensor& tensor) {
  return tessera::is_dtensor(tensor) ? tessera::DTensor(tensor).full_tensor() : tensor;
}

/// A Linear without bias, with the dtype and the device of `weight`.
nn::Linear linear_like(const torch::Tensor& weight, int64_t inputs, int64_t outputs) {
  const auto make = [&] { return nn::Linear(nn::LinearOptions(inputs, outputs).bias(false)); };
  auto linear = weight.is_meta() ? tessera::on_meta(make) : make();
  linear->to(weight.device(), weight.scalar_type());
  return linear;
}

bool is_target(const std::string& module, const std::string& target) {
  return module == target || module.ends_with("." + target);
}

nlohmann::ordered_json peft_config(const Options& options, const std::string& base) {
  return {{"peft_type", "LORA"},
          {"task_type", "FEATURE_EXTRACTION"},
          {"base_model_name_or_path", base},
          {"r", options.rank},
          {"lora_alpha", options.alpha},
          {"target_modules", options.targets},
          {"lora_dropout", 0.0},
          {"bias", "none"},
          {"fan_in_fan_out", false},
          {"init_lora_weights", true},
          {"inference_mode", true}};
}

} // namespace

void Options::read(tessera::OwnSettings& settings) {
  settings.read("lora_r", rank).read("lora_alpha", alpha).read("target_modules", targets);
  TORCH_CHECK_VALUE(rank >= 0, "lora_r is ", rank, ", but must be a rank, or 0 for no adapters");
  TORCH_CHECK_VALUE(std::isfinite(alpha) && alpha > 0, "lora_alpha is ", alpha, ", but must be positive");
  TORCH_CHECK_VALUE(!targets.empty(), "target_modules is empty: no layer would have an adapter");
}

torch::Tensor LinearImpl::forward(const torch::Tensor& input) {
  auto output = nn::LinearImpl::forward(input);
  return has_adapter() ? output + b_->forward(a_->forward(input)) * scale_ : output;
}

void LinearImpl::add_adapter(int64_t rank, double alpha) {
  TORCH_CHECK_VALUE(!has_adapter(), "the layer has an adapter already");
  const auto inputs = options.in_features(), outputs = options.out_features();
  TORCH_CHECK_VALUE(rank > 0 && rank <= std::min(inputs, outputs), "an adapter of rank ", rank, " for a layer of ", inputs,
                    " inputs and ", outputs, " outputs");
  for (auto& parameter : parameters()) parameter.requires_grad_(false);
  a_ = register_module("lora_A", linear_like(weight, inputs, rank));
  b_ = register_module("lora_B", linear_like(weight, rank, outputs));
  scale_ = alpha / static_cast<double>(rank);
}

void LinearImpl::reset_adapter() {
  const torch::NoGradGuard no_grad;
  nn::init::kaiming_uniform_(a_->weight, std::sqrt(5));
  b_->weight.zero_();
}

void LinearImpl::merge_adapter() {
  const torch::NoGradGuard no_grad;
  weight.copy_(whole(weight) + torch::mm(whole(b_->weight), whole(a_->weight)) * scale_);
  b_->weight.zero_();
}

void add_adapters(nn::Module& model, const Options& options) {
  for (auto& parameter : model.parameters()) parameter.requires_grad_(false);
  const auto modules = model.named_modules();
  for (const auto& target : options.targets) {
    bool found = false;
    for (const auto& module : modules) {
      if (!is_target(module.key(), target)) continue;
      auto* layer = module.value()->as<Linear>();
      TORCH_CHECK_VALUE(layer, "target_modules: ", module.key(), " is ", module.value()->name(), ", which cannot be adapted");
      if (!layer->has_adapter()) layer->add_adapter(options.rank, options.alpha); // two targets may name it
      found = true;
    }
    TORCH_CHECK_VALUE(found, "target_modules: no module of the model is called \"", target, "\"");
  }
}

std::vector<LinearImpl*> adapted_layers(nn::Module& model) {
  std::vector<LinearImpl*> layers;
  for (const auto& module : model.modules()) {
    auto* layer = module->as<Linear>();
    if (layer && layer->has_adapter()) layers.push_back(layer);
  }
  return layers;
}

bool is_adapter(const std::string& name) { return name.ends_with(".lora_A.weight") || name.ends_with(".lora_B.weight"); }

void save_adapters(const nn::Module& model, const Options& options, const std::string& base,
                   const std::filesystem::path& folder) {
  tessera::checkpoint::save_hugging_face(tessera::state_dict(model), folder,
                                         {.file_name = "adapter_model.safetensors",
                                          .filter = is_adapter,
                                          .rename = [](const std::string& name) { return "base_model.model." + name; },
                                          .overwrite = true});
  if (examples::rank() != 0) return;
  auto file = examples::open_for_writing((folder / "adapter_config.json").string());
  file << peft_config(options, base).dump(2) << '\n';
  TORCH_CHECK(file.flush(), "cannot write ", (folder / "adapter_config.json").string());
}

} // namespace lora
