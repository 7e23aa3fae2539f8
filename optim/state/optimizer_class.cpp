#include <c10/util/Exception.h>
#include <c10/util/Type.h>
#include <tessera/optim/optimizer_class.h>

#include <algorithm>
#include <deque>
#include <mutex>
#include <set>
#include <typeinfo>

namespace tessera::internal {

namespace {

using torch::optim::Optimizer;

// A field of a list is saved as "old_dirs.0", so a dot in a name could make two names one.
void check_name(const std::string& optimizer, const std::string& field) {
  TORCH_CHECK(!field.empty() && field.find('.') == std::string::npos, "register_optimizer of ", optimizer,
              ": a field has the name \"", field, "\"; it must not be empty and not contain a dot");
}

template <typename... Fields>
void check_names(const std::string& optimizer, std::set<std::string> taken, const Fields&... lists) {
  const auto check = [&](const auto& list) {
    for (const auto& field : list) {
      check_name(optimizer, field.name);
      TORCH_CHECK(taken.insert(field.name).second, "register_optimizer of ", optimizer, ": the name \"", field.name,
                  "\" of a field is taken");
    }
  };
  (check(lists), ...);
}

class ClassRegistry {
 public:
  void add(OptimizerClass added) {
    const std::lock_guard lock(mutex_);
    for (const auto& other : classes_) {
      TORCH_CHECK(other.type != added.type, "register_optimizer: the class ", c10::demangle(added.type.name()),
                  " is registered already, as ", other.name);
      TORCH_CHECK(other.name != added.name, "register_optimizer: the name ", added.name, " is taken by the class ",
                  c10::demangle(other.type.name()));
    }
    classes_.push_front(std::move(added));
  }

  const OptimizerClass& find(const Optimizer& optimizer) const {
    const std::lock_guard lock(mutex_);
    auto found = std::find_if(classes_.begin(), classes_.end(), [&](const auto& each) { return each.type == typeid(optimizer); });
    if (found == classes_.end())
      found = std::find_if(classes_.begin(), classes_.end(), [&](const auto& each) { return each.is_instance(optimizer); });
    TORCH_CHECK(found != classes_.end(), "the state of an optimizer of class ", c10::demangle(typeid(optimizer).name()),
                " is not known: say what it keeps with tessera::register_optimizer");
    return *found;
  }

 private:
  mutable std::mutex mutex_;
  std::deque<OptimizerClass> classes_; // the one registered last first; a deque's elements stay where they are
};

ClassRegistry& registry() {
  static ClassRegistry* const classes = [] {
    auto* made = new ClassRegistry; // never freed: optimizers may outlive static objects
    for (auto& each : torch_optimizers()) made->add(std::move(each));
    return made;
  }();
  return *classes;
}

} // namespace

const OptimizerClass& class_of(const Optimizer& optimizer) { return registry().find(optimizer); }

void add_optimizer_class(OptimizerClass added) {
  TORCH_CHECK(!added.name.empty(), "register_optimizer: the class ", c10::demangle(added.type.name()), " has an empty name");
  check_names(added.name, {}, added.tensors, added.values);
  check_names(added.name, {"params"}, added.options);
  check_names(added.name, {"type", "state", "param_groups", "parameters"}, added.own);
  registry().add(std::move(added));
}

void throw_other_class(const std::type_info& found, const std::type_info& registered) {
  TORCH_CHECK(false, "an optimizer keeps an object of class ", c10::demangle(found.name()),
              ", and was registered (tessera::register_optimizer) with the class ", c10::demangle(registered.name()));
}

} // namespace tessera::internal
