// Trains a step that Python compiled with AOTInductor, loss and gradients in one graph, with its parameters sharded over ranks.
//
//   .venv/bin/python examples/exported_step/export_step.py runs/exported_step
//   build/release/bin/train_exported_step --ranks 2 --folder runs/exported_step

#include <absl/flags/flag.h>
#include <tessera/tessera.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/torch.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "common/command_line.h"
#include "common/program.h"
#include "common/ranks.h"

ABSL_FLAG(int, ranks, 0, "local ranks to start; 0: this process is a rank that torchrun or Slurm started, or the only one");
ABSL_FLAG(std::string, folder, "runs/exported_step", "has step.pt2 and start.pt, as export_step.py writes them; gets trained/");
ABSL_FLAG(int64_t, steps, 20, "steps of SGD");
ABSL_FLAG(double, lr, 0.1, "learning rate");

namespace {

using torch::Tensor;
using torch::autograd::variable_list;

/// A graph that computes a loss and the gradients of the parameters, which it takes by name.
class CompiledStep {
 public:
  explicit CompiledStep(const std::filesystem::path& package) : loader_(package.string()) {
    const auto metadata = loader_.get_metadata();
    const auto found = metadata.find("gradients");
    TORCH_CHECK(found != metadata.end(), package.string(), " does not say of which parameters it has gradients");
    for (size_t begin = 0; begin <= found->second.size();) {
      const auto end = std::min(found->second.find(',', begin), found->second.size());
      names_.push_back(found->second.substr(begin, end - begin));
      begin = end + 1;
    }
  }

  const std::vector<std::string>& names() const { return names_; }

  /// The loss, then the gradients in the order of `names`. The parameters, whole, are read where they are.
  std::vector<Tensor> run(const std::vector<Tensor>& parameters, const std::vector<Tensor>& inputs) {
    std::unordered_map<std::string, Tensor> by_name;
    for (size_t i = 0; i < names_.size(); ++i) by_name.emplace(names_[i], parameters[i]);
    loader_.load_constants(by_name, /*use_inactive=*/false, /*check_full_update=*/true, /*user_managed=*/true);
    auto outputs = loader_.run(inputs);
    TORCH_CHECK(outputs.size() == names_.size() + 1, "the step returned ", outputs.size(), " tensors, but has the gradients of ",
                names_.size(), " parameters beside the loss");
    return outputs;
  }

 private:
  torch::inductor::AOTIModelPackageLoader loader_;
  std::vector<std::string> names_;
};

/// The loss as a function of the parameters, for autograd.
struct Loss : torch::autograd::Function<Loss> {
  static Tensor forward(torch::autograd::AutogradContext* context, CompiledStep* step, const std::vector<Tensor>& inputs,
                        at::TensorList parameters) {
    std::vector<Tensor> whole;
    for (const auto& parameter : parameters) whole.push_back(tessera::unsharded(parameter));
    auto outputs = step->run(whole, inputs);
    context->saved_data["gradients"] = std::vector<Tensor>(outputs.begin() + 1, outputs.end());
    return outputs[0];
  }
  static variable_list backward(torch::autograd::AutogradContext* context, variable_list gradients) {
    variable_list result(2); // none of the step and of the inputs
    for (const auto& gradient : context->saved_data["gradients"].toTensorVector()) result.push_back(gradient * gradients[0]);
    return result;
  }
};

/// A module with the parameters of a step: those of "model.up.weight" in a module of modules, under Python's names.
struct Parameters : torch::nn::Module {
  void add(const std::string& name, const Tensor& value) {
    const auto dot = name.find('.');
    if (dot == std::string::npos) {
      register_parameter(name, value.clone());
      return;
    }
    const auto first = name.substr(0, dot);
    auto children = named_children();
    auto* const known = children.find(first);
    auto child = known ? std::static_pointer_cast<Parameters>(*known) : register_module(first, std::make_shared<Parameters>());
    child->add(name.substr(dot + 1), value);
  }
};

/// What torch.save wrote: a dict of tensors.
std::unordered_map<std::string, Tensor> read_tensors(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  TORCH_CHECK(file, "cannot read ", path.string());
  const std::vector<char> bytes(std::istreambuf_iterator<char>(file), {});
  std::unordered_map<std::string, Tensor> tensors;
  for (const auto& item : torch::pickle_load(bytes).toGenericDict())
    tensors.emplace(item.key().toStringRef(), item.value().toTensor());
  return tensors;
}

void worker() {
  examples::join_job(/*threads=*/0);
  const std::filesystem::path folder = absl::GetFlag(FLAGS_folder);
  const auto mesh = tessera::init_device_mesh(torch::kCPU, {examples::world_size()}, {"shard"});
  const auto start = read_tensors(folder / "start.pt");
  CompiledStep step(folder / "step.pt2");
  const auto module = std::make_shared<Parameters>();
  for (const auto& name : step.names()) module->add(name, start.at(name));
  tessera::fully_shard(*module, mesh);
  variable_list parameters; // in the order of the step
  for (const auto named = module->named_parameters(); const auto& name : step.names()) parameters.push_back(named[name]);

  torch::optim::SGD optimizer(module->parameters(), torch::optim::SGDOptions(absl::GetFlag(FLAGS_lr)).momentum(0.9));
  const int64_t rows = 4, world = examples::world_size(); // of a rank: the shapes that were compiled
  for (int64_t i = 0; i < absl::GetFlag(FLAGS_steps); ++i) {
    const auto first = (i * world + examples::rank()) * rows;
    const auto chosen = torch::remainder(torch::arange(first, first + rows), start.at("x").size(0));
    optimizer.zero_grad();
    const std::vector<Tensor> inputs{start.at("x").index_select(0, chosen), start.at("y").index_select(0, chosen)};
    const auto loss = Loss::apply(&step, inputs, at::TensorList(parameters));
    loss.backward();
    tessera::clip_grad_norm_(*module, 1.0);
    optimizer.step();
    const auto mean = examples::mean_over_ranks({loss.item<double>()})[0];
    if (examples::rank() == 0) std::printf("step %2ld  loss %.9g\n", static_cast<long>(i + 1), mean);
    std::fflush(stdout);
  }
  tessera::checkpoint::save_hugging_face(tessera::state_dict(*module), folder / "trained", {.overwrite = true});
  tessera::destroy_process_group();
}

} // namespace

int main(int argc, char** argv) {
  return examples::run_program("train_exported_step", [&] {
    examples::parse_command_line(argc, argv, "Trains a step that AOTInductor compiled, sharded over ranks.",
                                 "exported_step/train_exported_step.cpp");
    return examples::run_ranks(absl::GetFlag(FLAGS_ranks), worker);
  });
}
