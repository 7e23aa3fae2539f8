#include <tessera/parallel/pipeline_layers.h>

#include <c10/util/Exception.h>
#include <c10/util/Type.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>

#include <algorithm>

#include <tessera/parallel/stages/names.h>

namespace tessera {

using internal::pipeline::ModelNames;

PipelineLayers& PipelineLayers::add_layer(Layer layer) {
  TORCH_CHECK_VALUE(!layer.name.empty(), "a layer of a pipeline has no name");
  const bool is_taken = std::any_of(layers_.begin(), layers_.end(), [&](const Layer& other) { return other.name == layer.name; });
  TORCH_CHECK_VALUE(!is_taken, "two layers of a pipeline have the name '", layer.name, "'");
  const ModelNames names(*model_);
  for (const auto& member : layer.members) {
    const bool exists = names.modules.contains(member) || names.parameters.contains(member) || names.buffers.contains(member);
    TORCH_CHECK_VALUE(exists, "the layer '", layer.name, "' of a pipeline has the member '", member,
                      "', but nothing in the model has such a name; the nearest is '", names.nearest(member), "'");
  }
  layers_.push_back(std::move(layer));
  return *this;
}

PipelineLayers& PipelineLayers::tie(const std::string& name) {
  const ModelNames names(*model_);
  TORCH_CHECK_VALUE(names.parameters.contains(name), "PipelineLayers::tie: the model has no parameter '", name,
                    "'; the nearest name is '", names.nearest(name), "'");
  ties_.push_back(name);
  return *this;
}

namespace {

template <typename Container>
Container& container(const torch::nn::Module& model, const std::string& name, const char* what) {
  const ModelNames names(model);
  const auto found = names.modules.find(name);
  TORCH_CHECK_VALUE(found != names.modules.end(), "the model has no module '", name, "' that a pipeline could take as a ", what,
                    "; the nearest name is '", names.nearest(name), "'");
  auto* const container = dynamic_cast<Container*>(found->second.get());
  TORCH_CHECK_VALUE(container, "the module '", name, "' is no ", what, " but a ", found->second->name());
  return *container;
}

} // namespace

std::vector<torch::nn::Module*> PipelineLayers::modules_of_list(const std::string& name) const {
  std::vector<torch::nn::Module*> modules;
  for (const auto& each : container<torch::nn::ModuleListImpl>(*model_, name, "ModuleList")) modules.push_back(each.get());
  return modules;
}

void PipelineLayers::check_class(bool fits, const std::string& path, const char* wanted) {
  TORCH_CHECK_VALUE(fits, "the module '", path, "' is no ", c10::demangle(wanted), ", which the layers' function takes");
}

PipelineLayers& PipelineLayers::add_sequential(const std::string& name) {
  auto& sequential = container<torch::nn::SequentialImpl>(*model_, name, "Sequential");
  size_t i = 0;
  for (const auto& child : sequential.named_children()) {
    const auto path = name + "." + child.key();
    // The module's AnyModule, which is the only one to know its forward, lives as long as the Sequential.
    auto* const any = &*(sequential.begin() + static_cast<int64_t>(i++));
    add_layer({path, {path}, wrapped([any](const at::Tensor& x) { return any->forward<at::Tensor>(x); })});
  }
  return *this;
}

} // namespace tessera
