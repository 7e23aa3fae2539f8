#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <tessera/checkpoint/bytes/pickle_writer.h>
#include <tessera/checkpoint/formats/module_tree.h>

#include <cctype>
#include <deque>
#include <map>
#include <unordered_map>

namespace tessera::internal {

namespace {

constexpr const char* kNamespace = "__torch__";

struct Module {
  std::vector<std::pair<std::string, std::variant<Module*, const ModuleField*>>> fields;
  std::unordered_map<std::string, size_t> positions; // of fields
  std::string class_name;
};

// Writes a name as a TorchScript literal.
std::string quoted(const std::string& name) {
  std::string text = "\"";
  for (const char c : name) {
    if (c == '"' || c == '\\') {
      text += {'\\', c};
    } else if (std::isprint(static_cast<unsigned char>(c)) != 0) {
      text += c;
    } else {
      text += fmt::format("\\{:03o}", static_cast<unsigned char>(c));
    }
  }
  return text + "\"";
}

std::string type_of(const StateValue& value) {
  constexpr const char* kTypes[] = {"bool", "int", "float", "str", "List[int]", "List[float]", "List[str]"};
  static_assert(std::variant_size_v<StateValue> == std::size(kTypes));
  return kTypes[value.index()];
}

class Archiver {
 public:
  Archiver(const std::vector<std::pair<std::string, ModuleField>>& fields, const std::vector<std::string>& submodules) {
    for (const auto& [name, field] : fields) add(name, field);
    for (const auto& name : submodules) add_submodule(name);
  }

  ModuleArchive run() {
    name_class(root());
    PickleWriter out;
    write(out, root());
    return {std::move(out).take(), std::move(code_)};
  }

 private:
  Module& root() { return modules_.front(); }

  void add(const std::string& name, const ModuleField& field) {
    auto* module = &root();
    for (size_t begin = 0;;) {
      const auto dot = name.find('.', begin);
      const auto part = name.substr(begin, dot - begin);
      TORCH_CHECK(!part.empty(), "\"", name,
                  "\" has an empty part before, between or after its dots, which torch::load cannot read");
      const auto [found, is_new] = module->positions.emplace(part, module->fields.size());
      const bool is_leaf = dot == std::string::npos;
      if (is_new)
        module->fields.emplace_back(
            part, is_leaf ? decltype(module->fields)::value_type::second_type(&field) : &modules_.emplace_back());
      auto* const* inner = std::get_if<Module*>(&module->fields[found->second].second);
      TORCH_CHECK(is_leaf ? is_new : inner != nullptr, "\"", is_leaf ? name : name.substr(0, dot),
                  "\" is an entry and the begin of another one's name, which torch::load cannot read");
      if (is_leaf) return;
      module = *inner;
      begin = dot + 1;
    }
  }

  // Adds nothing where an entry has the name.
  void add_submodule(const std::string& name) {
    auto* module = &root();
    for (size_t begin = 0;;) {
      const auto dot = name.find('.', begin);
      const auto [found, is_new] = module->positions.emplace(name.substr(begin, dot - begin), module->fields.size());
      if (is_new) module->fields.emplace_back(found->first, &modules_.emplace_back());
      auto* const* inner = std::get_if<Module*>(&module->fields[found->second].second);
      if (inner == nullptr || dot == std::string::npos) return;
      module = *inner;
      begin = dot + 1;
    }
  }

  // Modules with the same fields share a class.
  void name_class(Module& module) {
    std::string body = "  __parameters__ = []\n  __buffers__ = []\n  __annotations__ = []\n";
    for (const auto& [name, field] : module.fields) {
      std::string type = "Tensor";
      if (auto* const* inner = std::get_if<Module*>(&field)) {
        name_class(**inner);
        type = std::string(kNamespace) + "." + (*inner)->class_name;
      } else if (const auto* value = std::get_if<StateValue>(std::get<const ModuleField*>(field))) {
        type = type_of(*value);
      }
      body += fmt::format("  __annotations__[{}] = {}\n", quoted(name), type);
    }
    const auto [found, is_new] = classes_.emplace(body, fmt::format("Module{}", classes_.size()));
    module.class_name = found->second;
    if (is_new) code_ += fmt::format("class {}(Module):\n{}", module.class_name, body);
  }

  void write(PickleWriter& out, const Module& module) {
    out.object(kNamespace, module.class_name);
    out.empty_dict();
    out.open();
    for (const auto& [name, field] : module.fields) {
      out.text(name);
      if (auto* const* inner = std::get_if<Module*>(&field)) {
        write(out, **inner);
      } else {
        std::visit([&](const auto& leaf) { write_field(out, leaf); }, *std::get<const ModuleField*>(field));
      }
    }
    out.close_dict();
    out.build();
  }

  static void write_field(PickleWriter& out, const StoredTensor& tensor) {
    write_tensor(out, tensor.dtype, tensor.sizes, tensor.key, /*for_python=*/false);
  }
  static void write_field(PickleWriter& out, const StateValue& value) { write_typed_value(out, value); }

  std::deque<Module> modules_{1};              // does not move its elements
  std::map<std::string, std::string> classes_; // body → name
  std::string code_;
};

} // namespace

ModuleArchive module_archive(const std::vector<std::pair<std::string, ModuleField>>& fields,
                             const std::vector<std::string>& submodules) {
  return Archiver(fields, submodules).run();
}

} // namespace tessera::internal
