#include <tessera/plan/models/tree.h>

namespace tessera::internal::models {

torch::nn::Module& module_at(torch::nn::Module& root, const std::string& path) {
  auto* module = &root;
  for (size_t begin = 0; begin < path.size();) {
    const auto end = std::min(path.find('.', begin), path.size());
    const auto name = path.substr(begin, end - begin);
    const auto children = module->named_children();
    const auto* child = children.find(name);
    module = child ? child->get() : module->register_module(name, std::make_shared<torch::nn::Module>(name)).get();
    begin = end + 1;
  }
  return *module;
}

std::pair<std::string, std::string> parent_and_name(const std::string& path) {
  const auto dot = path.rfind('.');
  if (dot == std::string::npos) return {"", path};
  return {path.substr(0, dot), path.substr(dot + 1)};
}

} // namespace tessera::internal::models
