// The parts of libcu++ that TVM's CUDA source names, for NVRTC without libcu++.
// Included by several names, which a pragma would take for several files.
#ifndef ECORNN_NVRTC_STD_H_
#define ECORNN_NVRTC_STD_H_
namespace cuda {
namespace std {
using int8_t = signed char;
using uint8_t = unsigned char;
using int16_t = short;
using uint16_t = unsigned short;
using int32_t = int;
using uint32_t = unsigned int;
using int64_t = long;
using uint64_t = unsigned long;

template <bool V>
struct constant {
  static constexpr bool value = V;
};
template <class A, class B>
struct is_same : constant<false> {};
template <class A>
struct is_same<A, A> : constant<true> {};
template <class A, class B>
inline constexpr bool is_same_v = is_same<A, B>::value;

template <class A, class... Bs>
struct is_any : constant<(is_same_v<A, Bs> || ...)> {};
template <class A>
struct is_floating_point : is_any<A, float, double> {};
template <class A>
struct is_integral
    : is_any<A, bool, char, signed char, unsigned char, short, unsigned short, int, unsigned int, long,
             unsigned long, long long, unsigned long long> {};
template <class A>
struct is_signed : is_any<A, float, double, signed char, char, short, int, long, long long> {};
template <class A>
struct is_unsigned
    : is_any<A, bool, unsigned char, unsigned short, unsigned int, unsigned long, unsigned long long> {};

template <bool C, class A = void>
struct enable_if {};
template <class A>
struct enable_if<true, A> {
  using type = A;
};
template <bool C, class A, class B>
struct conditional {
  using type = A;
};
template <class A, class B>
struct conditional<false, A, B> {
  using type = B;
};
}  // namespace std
}  // namespace cuda
#endif
