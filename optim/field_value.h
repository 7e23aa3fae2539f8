#pragma once

// Internal: members of an optimizer's state and options as tensors and as values of a state dict.

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <concepts>
#include <deque>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include <tessera/optim/state_value.h>

namespace tessera::internal {

template <typename T, template <typename...> class Template>
inline constexpr bool kIsInstance = false;
template <template <typename...> class Template, typename... Arguments>
inline constexpr bool kIsInstance<Template<Arguments...>, Template> = true;

template <typename T>
inline constexpr bool kIsTensorList = std::same_as<T, std::vector<at::Tensor>> || std::same_as<T, std::deque<at::Tensor>>;
template <typename T>
inline constexpr bool kIsTensor = std::same_as<T, at::Tensor> || std::same_as<T, std::optional<at::Tensor>> || kIsTensorList<T>;

/// The tensors of a field: none if it is undefined, one, or all of a list.
template <typename T>
std::vector<at::Tensor> tensors_of(const T& field) {
  if constexpr (kIsTensorList<T>) {
    return {field.begin(), field.end()};
  } else {
    const auto tensor = std::optional<at::Tensor>(field).value_or(at::Tensor());
    return tensor.defined() ? std::vector<at::Tensor>{tensor} : std::vector<at::Tensor>{};
  }
}

template <typename T>
void assign_tensors(T& field, const std::vector<at::Tensor>& tensors) {
  if constexpr (kIsTensorList<T>) {
    field.assign(tensors.begin(), tensors.end());
  } else if (tensors.empty()) {
    field = T();
  } else {
    field = tensors[0];
  }
}

template <typename T>
inline constexpr bool kIsScalar = std::is_arithmetic_v<T> || std::is_enum_v<T> || std::same_as<T, std::string>;

/// Converts to a bool, int64_t, double or std::string.
template <typename T>
auto to_scalar(const T& field) {
  static_assert(
      kIsScalar<T>,
      "a field is a tensor or a list of tensors, a number, bool, enum or std::string, or an optional, tuple, pair, array, "
      "vector or deque of these");
  if constexpr (std::same_as<T, bool> || std::same_as<T, std::string>) {
    return field;
  } else if constexpr (std::floating_point<T>) {
    return static_cast<double>(field);
  } else {
    return static_cast<int64_t>(field);
  }
}

/// The way back; an error for an integer that `T` does not hold.
template <typename T, typename Scalar>
T from_scalar(const Scalar& value) {
  auto field = static_cast<T>(value);
  if constexpr (std::same_as<Scalar, int64_t>)
    TORCH_CHECK(static_cast<int64_t>(field) == value, "the number ", value, " does not fit the field's type");
  return field;
}

// What a list of fields is saved as. There are no lists of bools.
template <typename... Fields>
using ListElement =
    std::common_type_t<std::conditional_t<std::same_as<Fields, bool>, int64_t, decltype(to_scalar(std::declval<Fields>()))>...>;

template <typename T>
inline constexpr bool kIsSequence = kIsInstance<T, std::vector> || kIsInstance<T, std::deque>;

/// An optional is a list of none or one.
template <typename T>
StateValue to_value(const T& field) {
  if constexpr (kIsScalar<T>) {
    return to_scalar(field);
  } else if constexpr (kIsInstance<T, std::optional> || kIsSequence<T>) {
    std::vector<ListElement<typename T::value_type>> list;
    if constexpr (kIsSequence<T>) {
      for (const auto& element : field) list.push_back(to_scalar<typename T::value_type>(element));
    } else if (field) {
      list.push_back(to_scalar(*field));
    }
    return list;
  } else {
    return std::apply(
        []<typename... Elements>(const Elements&... elements) {
          return std::vector<ListElement<Elements...>>{static_cast<ListElement<Elements...>>(to_scalar(elements))...};
        },
        field);
  }
}

/// `value` has the type that `to_value` returns. An error for a list of a length that `field` cannot have.
template <typename T>
void assign_value(T& field, const StateValue& value) {
  if constexpr (kIsScalar<T>) {
    field = from_scalar<T>(std::get<decltype(to_scalar(field))>(value));
  } else if constexpr (kIsInstance<T, std::optional> || kIsSequence<T>) {
    const auto& list = std::get<std::vector<ListElement<typename T::value_type>>>(value);
    field = T();
    if constexpr (kIsSequence<T>) {
      for (const auto& element : list) field.push_back(from_scalar<typename T::value_type>(element));
    } else {
      TORCH_CHECK(list.size() <= 1, "a field that holds one value or none was saved with ", list.size());
      if (!list.empty()) field = from_scalar<typename T::value_type>(list[0]);
    }
  } else {
    std::apply(
        [&]<typename... Elements>(Elements&... elements) {
          const auto& list = std::get<std::vector<ListElement<Elements...>>>(value);
          TORCH_CHECK(list.size() == sizeof...(elements), "a field of ", sizeof...(elements), " values was saved with ",
                      list.size());
          size_t next = 0;
          ((elements = from_scalar<Elements>(list[next++])), ...);
        },
        field);
  }
}

} // namespace tessera::internal
