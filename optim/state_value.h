#pragma once

#include <cstdint>
#include <string>
#include <type_traits>
#include <variant>
#include <vector>

namespace tessera {

/// A value of a state dict that is no tensor: a step, a learning rate, a list of names.
using StateValue =
    std::variant<bool, int64_t, double, std::string, std::vector<int64_t>, std::vector<double>, std::vector<std::string>>;

/// True for the types that a StateValue may hold.
template <typename T, typename Variant = StateValue>
struct IsStateValue : std::false_type {};
template <typename T, typename... Alternatives>
struct IsStateValue<T, std::variant<Alternatives...>> : std::disjunction<std::is_same<T, Alternatives>...> {};

} // namespace tessera
