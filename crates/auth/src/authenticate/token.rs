//! The tokens of service accounts: JSON Web Tokens signed with ES256. Reads no stored objects: `service_account` checks
//! that those a token is bound to still exist.

use std::path::Path;

use base64::Engine;
use base64::prelude::BASE64_URL_SAFE_NO_PAD as BASE64;
use ring::digest::{SHA256, digest};
use ring::rand::SystemRandom;
use ring::signature::{
    ECDSA_P256_SHA256_FIXED, ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair, KeyPair as _, UnparsedPublicKey,
};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::pki::{self, PkiError};

/// The issuer of the tokens, and the default audience.
pub const ISSUER: &str = "https://kubernetes.default.svc.cluster.local";
const MAX_TOKEN_BYTES: usize = 16 << 10;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TokenClaims {
    pub aud: Vec<String>,
    pub exp: i64,
    pub iat: i64,
    pub iss: String,
    pub jti: String,
    #[serde(rename = "kubernetes.io")]
    pub kubernetes: KubernetesClaims,
    pub nbf: i64,
    pub sub: String,
}

/// The private claims of Kubernetes: the service account, and the objects with which the token becomes invalid.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct KubernetesClaims {
    pub namespace: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<BoundObject>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod: Option<BoundObject>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub secret: Option<BoundObject>,
    pub serviceaccount: BoundObject,
    /// Seconds since the epoch. Set if the token lives longer than requested: its use after this time should cause a
    /// warning.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub warnafter: Option<i64>,
}

/// Name and uid of an object that a token is bound to.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BoundObject {
    pub name: String,
    pub uid: String,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TokenError {
    #[error("the token is malformed")]
    Malformed,
    #[error("the token was not signed by this server")]
    Signature,
    #[error("the token is of another issuer")]
    Issuer,
    #[error("the token has expired")]
    Expired,
    #[error("the token is not valid yet")]
    NotYetValid,
    #[error("the token is not meant for this audience")]
    Audience,
    #[error("{0}")]
    Gone(String),
}

/// Signs and verifies tokens with one ECDSA key pair.
pub struct TokenSigner {
    key: EcdsaKeyPair,
    /// The hash of the public key, base64. Tokens carry it in their header.
    key_id: String,
    random: SystemRandom,
}

impl TokenSigner {
    /// Reads `sa.key` in the directory; creates it if it does not exist.
    pub fn open(dir: &Path) -> Result<Self, PkiError> {
        let path = dir.join("sa.key");
        let unusable = |source| PkiError::Unusable { path: path.clone(), source };
        let pair = match pki::read(&path)? {
            Some(pem) => rcgen::KeyPair::from_pem(&pem).map_err(unusable)?,
            None => {
                let pair = rcgen::KeyPair::generate().map_err(|source| PkiError::Create { name: "sa", source })?;
                pki::write_private(&path, pair.serialize_pem().as_bytes())?;
                pair
            }
        };
        let random = SystemRandom::new();
        let key = EcdsaKeyPair::from_pkcs8(&ECDSA_P256_SHA256_FIXED_SIGNING, &pair.serialize_der(), &random)
            .map_err(|_| unusable(rcgen::Error::CouldNotParseKeyPair))?;
        let key_id = BASE64.encode(digest(&SHA256, key.public_key().as_ref()));
        Ok(Self { key, key_id, random })
    }

    /// The signed token. `None` if the claims cannot be encoded or signed.
    pub fn sign(&self, claims: &TokenClaims) -> Option<String> {
        let part = |value: String| BASE64.encode(value);
        let header = part(json!({ "alg": "ES256", "kid": self.key_id }).to_string());
        let signed = format!("{header}.{}", part(serde_json::to_string(claims).ok()?));
        let signature = self.key.sign(&self.random, signed.as_bytes()).ok()?;
        Some(format!("{signed}.{}", BASE64.encode(signature)))
    }

    /// Verifies that this server signed the token, that it is valid at `now` (seconds since the epoch), and that it is
    /// issued for one of `audiences`. Returns the claims, and those of `audiences` that the token is issued for.
    pub fn verify(
        &self,
        token: &str,
        audiences: &[String],
        now: i64,
    ) -> Result<(TokenClaims, Vec<String>), TokenError> {
        if token.len() > MAX_TOKEN_BYTES {
            return Err(TokenError::Malformed);
        }
        let (signed, signature) = token.rsplit_once('.').ok_or(TokenError::Malformed)?;
        let (header, payload) = signed.split_once('.').ok_or(TokenError::Malformed)?;
        let decode = |part: &str| BASE64.decode(part).map_err(|_| TokenError::Malformed);
        let header: Value = serde_json::from_slice(&decode(header)?).map_err(|_| TokenError::Malformed)?;
        // Only the server chooses the algorithm: a token must not select a weaker one, or none.
        if header["alg"] != "ES256" || header["kid"] != self.key_id.as_str() {
            return Err(TokenError::Signature);
        }
        UnparsedPublicKey::new(&ECDSA_P256_SHA256_FIXED, self.key.public_key())
            .verify(signed.as_bytes(), &decode(signature)?)
            .map_err(|_| TokenError::Signature)?;
        let claims: TokenClaims = serde_json::from_slice(&decode(payload)?).map_err(|_| TokenError::Malformed)?;
        if claims.iss != ISSUER {
            return Err(TokenError::Issuer);
        }
        if claims.exp <= now {
            return Err(TokenError::Expired);
        }
        if claims.nbf > now {
            return Err(TokenError::NotYetValid);
        }
        let matching: Vec<String> = audiences.iter().filter(|a| claims.aud.contains(a)).cloned().collect();
        if matching.is_empty() { Err(TokenError::Audience) } else { Ok((claims, matching)) }
    }

    /// The JSON Web Key Set with which clients verify the tokens.
    pub fn key_set(&self) -> Value {
        let point = self.key.public_key().as_ref();
        // An uncompressed point: one byte for the format, then two coordinates of 32 bytes.
        let coordinate = |from: usize| BASE64.encode(point.get(from..from + 32).unwrap_or_default());
        json!({ "keys": [{
            "use": "sig", "kty": "EC", "kid": self.key_id, "crv": "P-256", "alg": "ES256",
            "x": coordinate(1), "y": coordinate(33),
        }] })
    }
}

/// The OpenID provider configuration, at `/.well-known/openid-configuration`.
pub fn openid_configuration() -> Value {
    json!({
        "issuer": ISSUER, "jwks_uri": format!("{ISSUER}/openid/v1/jwks"), "response_types_supported": ["id_token"],
        "subject_types_supported": ["public"], "id_token_signing_alg_values_supported": ["ES256"],
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claims() -> TokenClaims {
        let serviceaccount = BoundObject { name: "s".into(), uid: "u".into() };
        TokenClaims {
            aud: vec![ISSUER.into(), "other".into()],
            exp: 200,
            iat: 100,
            iss: ISSUER.into(),
            jti: "j".into(),
            kubernetes: KubernetesClaims { namespace: "n".into(), serviceaccount, ..KubernetesClaims::default() },
            nbf: 100,
            sub: "system:serviceaccount:n:s".into(),
        }
    }

    #[test]
    fn a_token_is_valid_only_in_its_lifetime_and_for_its_audiences() {
        let dir = tempfile::tempdir().unwrap();
        let signer = TokenSigner::open(dir.path()).unwrap();
        let token = signer.sign(&claims()).unwrap();
        for (case, audience, now, want) in [
            ("within its lifetime", ISSUER, 150, None),
            ("for its other audience", "other", 150, None),
            ("too early", ISSUER, 99, Some(TokenError::NotYetValid)),
            ("at its expiry", ISSUER, 200, Some(TokenError::Expired)),
            ("for another audience", "stranger", 150, Some(TokenError::Audience)),
        ] {
            assert_eq!(signer.verify(&token, &[audience.into()], now).err(), want, "{case}");
        }
        let again = TokenSigner::open(dir.path()).unwrap();
        assert_eq!(
            again.verify(&token, &[ISSUER.into()], 150).unwrap().0,
            claims(),
            "the key is the same after a restart"
        );
    }

    #[test]
    fn a_forged_token_is_refused() {
        let dirs = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
        let [own, other] = dirs.each_ref().map(|d| TokenSigner::open(d.path()).unwrap());
        let token = own.sign(&claims()).unwrap();
        let parts: Vec<&str> = token.split('.').collect();
        let forged = BASE64.encode(serde_json::to_string(&TokenClaims { exp: 900, ..claims() }).unwrap());
        let none = BASE64.encode(r#"{"alg":"none"}"#);
        for (case, token, want) in [
            ("claims changed", format!("{}.{forged}.{}", parts[0], parts[2]), TokenError::Signature),
            ("no algorithm", format!("{none}.{}.", parts[1]), TokenError::Signature),
            ("signed by another", other.sign(&claims()).unwrap(), TokenError::Signature),
            ("no signature", format!("{}.{}", parts[0], parts[1]), TokenError::Malformed),
            ("not a token", "nonsense".into(), TokenError::Malformed),
            ("too long", "x.".repeat(MAX_TOKEN_BYTES), TokenError::Malformed),
        ] {
            assert_eq!(own.verify(&token, &[ISSUER.into()], 150).err(), Some(want), "{case}");
        }
    }
}
